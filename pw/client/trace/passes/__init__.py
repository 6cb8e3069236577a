"""From the jaxpr of a program to computations on meshes: *residuals*, then *place*."""
