"""Starts the launcher of a job, and follows the job until none of its processes is left.

supervisor       starts the launcher, follows what happens, and ends the job
die_with_parent  a command that ends with its parent
rank_wrapper     the parent of each rank; frames: what it sends
output           lines and files of the ranks, and the screen on which they are printed
failures         which rank failed first, and what else ended the job
"""
