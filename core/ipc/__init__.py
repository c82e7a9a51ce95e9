"""The core's end of the wire.

`bound_socket.BoundSocket` is its socket, `clients.Clients` knows who is connected, `request_handler.RequestHandler`
serves what they send, and `step_messages` writes the messages that carry a step's results.
"""
