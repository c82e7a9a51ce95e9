"""How a server is watched: health, metrics, the page and its data, traces."""
