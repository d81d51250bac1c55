"""Speed and memory, measured beside other implementations; the layer types of Table 1."""
