"""The C code of opteq, compiled: `opteq.native` finds and opens the libraries in this folder."""
