"""This rank's reports about itself when something goes wrong, or when nothing goes on.

exceptions  an exception of the script, told to the other ranks before this process ends of it
deadlock    whether all threads that could submit something wait
ranks_in_words  lists of ranks, for messages
call_sites  the line of the script that an operation came from
"""
