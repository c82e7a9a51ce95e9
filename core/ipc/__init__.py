"""The core's end of the wire: its socket, the requests that arrive and the messages that leave."""
