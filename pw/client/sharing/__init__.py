"""Arrays by name: `pw.publish` and `pw.lookup`."""
