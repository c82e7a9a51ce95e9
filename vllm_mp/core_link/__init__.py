"""What a core and its parent tell each other outside of the wire: the launch and the status page."""
