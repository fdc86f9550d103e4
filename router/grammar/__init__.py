"""Structured output in the router: which grammar a request asks for, and whether it compiles.

The library that compiles imports torch, so it runs in helper processes, whose memory and time are bounded.
"""
