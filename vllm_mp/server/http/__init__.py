"""What every endpoint stands on: bodies, errors, streams of events, admission, tenants, the state of the server."""
