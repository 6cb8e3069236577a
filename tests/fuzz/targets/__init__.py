"""The fuzz targets, one module for each decoder."""
