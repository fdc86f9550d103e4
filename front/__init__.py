"""What the fronts of the prefill and the decode server share: admission, the life of a request,
supervision, drain.
"""
