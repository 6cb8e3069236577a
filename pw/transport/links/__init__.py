"""Messages between processes: networks, links, connections and their wire format."""
