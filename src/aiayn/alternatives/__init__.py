"""What the paper argues against, and what others put in the place of its parts: one knob each, the plain way alone."""
