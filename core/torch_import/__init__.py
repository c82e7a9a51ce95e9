"""How a core imports torch, which takes longest of all that it imports."""
