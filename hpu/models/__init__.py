"""Models built from layers, and the registry that maps an architecture to its model. Contains no
back end and no kernel library."""
