"""Where cores come from: processes of this client, or a shared core at an address."""
