"""The client's actor: it talks to the controller and to hosts, and settles futures."""
