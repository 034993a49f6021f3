"""Data in an object store: their names and sizes, and copies of them on a disk."""
