"""What was committed, whose state is right, and the way back."""
