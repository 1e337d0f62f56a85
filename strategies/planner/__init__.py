"""The planner: buckets, their places and their addresses. Pure: integers in, a layout out; imports no torch."""
