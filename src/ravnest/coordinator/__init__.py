"""Who trains what with whom: a state that only events change, decisions that say why, a journal that remembers."""
