"""Several methods, several seeds, one budget: which is better, and how sure is that?"""
