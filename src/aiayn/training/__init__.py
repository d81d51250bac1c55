"""One run from its first update to its result: Lightning's module, data and callbacks, exact under resume."""
