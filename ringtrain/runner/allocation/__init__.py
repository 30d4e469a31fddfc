"""Where the ranks go: hosts as the user names them, or as a batch system has allotted them."""
