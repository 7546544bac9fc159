"""A model of real size on PCs of which none could hold it."""
