"""Training drafts: the corpus that the target writes, one loop for every head, their losses."""
