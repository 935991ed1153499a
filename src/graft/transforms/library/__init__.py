"""The transforms, one a file. The file name is the transform's name."""
