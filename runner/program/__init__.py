"""What the ranks run, as the user typed it: a Python file, a module, or a command of a Python package."""
