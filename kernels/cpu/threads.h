/* The kernels' own threads. See threads.c. */
#ifndef BATON_CPU_THREADS_H
#define BATON_CPU_THREADS_H

/* Does items [begin, end). */
typedef void (*share)(const void *job, long begin, long end);

/* Calls `work` for all of [0, items), in shares of `size`, on the calling thread and those that are free to help. */
void do_parallel(share work, const void *job, long items, long size);

/* Items per share, so that every thread gets about four: few enough to be cheap, enough to even out. */
long even_share(long items);

#endif
