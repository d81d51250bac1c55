"""Python imports a module of this name at its start: so every process that a test starts is without network, too."""

import offline  # noqa: F401
