"""The way into the core.

submission    submits operations on arrays, and returns their Handles
handles       results that the caller waits for; the arrays that the core still uses
process_sets  subsets of the ranks
requirements  checks of arguments
compression   how values are made smaller on their way
"""
