"""What the server says of its endpoints: for programs in OpenAPI, for people as a page."""
