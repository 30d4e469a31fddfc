"""A job from its start until nothing of it is left.

supervisor       starts the launcher and follows what happens
die_with_parent  a command that ends with whoever has started it
rank_wrapper     the parent of each rank; frames: what it sends
output, progress_bars, screen, printing
                 lines and files of the ranks, and what is printed where
first_failure    which rank failed first; end_reasons: what else ended the job
rank_signals     a signal for every rank; own_signals: one for this process
shutdown         the steps in which a job is ended; cleanup: what is left on this host
"""
