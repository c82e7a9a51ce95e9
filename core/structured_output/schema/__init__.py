"""JSON schemas: checks, and rewriting to grammars and schemas that llguidance compiles exactly."""
