"""The libraries that compile grammars, and the forms that they take."""
