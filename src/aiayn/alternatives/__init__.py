"""What the paper argues against, and what others put in the place of its parts: one key each."""
