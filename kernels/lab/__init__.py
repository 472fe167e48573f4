"""The instruments: everything the chapters share, importing no chapter."""
