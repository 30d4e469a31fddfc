"""Starts the launcher of a job, and follows the job until none of its processes is left.

supervisor       starts the launcher, follows what happens, and ends the job
guard            the parent of the launcher, which leaves nothing of the job on this host
slowest          the rank that the others have waited for
rank_wrapper     the parent of each rank; wrap: the script of it; frames: what it sends
binding          the processors of a rank
process_tree     signals that these inherit, and the processes that they leave
end_rule         when the ranks of a failed job are told to end
output           lines and files of the ranks, and the screen on which they are printed
failures         which rank failed first, and what else ended the job
"""
