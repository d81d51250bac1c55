"""The paper's model computed faster: `accelerate` attaches it to a Transformer, and the numbers stay the same."""
