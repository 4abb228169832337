"""What the routes of all APIs share: the server's state, and a request from its admission to its
answer.
"""
