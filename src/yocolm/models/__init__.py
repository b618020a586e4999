"""Model families, and everything between them and the files they come from."""
