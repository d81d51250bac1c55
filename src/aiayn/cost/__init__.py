"""What training takes before anything is trained: operations, memory, time, a schedule of devices."""
