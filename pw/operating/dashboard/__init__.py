"""A process beside the controller: a page, metrics and `pw top`, from one snapshot a second."""
