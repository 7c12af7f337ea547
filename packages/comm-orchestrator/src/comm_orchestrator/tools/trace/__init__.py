"""``commctl trace``: reads recorded communication, tells what it says, draws it, and runs it again."""
