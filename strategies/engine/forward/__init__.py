"""What forward keeps for backward, and how blocks compute."""
