// Clusters (sm_90): blocks of a launch that run at once and reach each other's shared memory. Where the
// launch asks for none, and on other cards, each block is alone in its own.
#pragma once

#include "common.cuh"

__device__ inline int cluster_size() {
#if !defined(MINFER_SIMT) && __CUDA_ARCH__ >= 900
    int blocks;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    return blocks;
#else
    return 1;
#endif
}

// A barrier in two halves: after the second, all threads of all blocks of the cluster have been at the
// first, and what they wrote before is visible. Blocks that have ended count as having been there.
__device__ inline void cluster_arrive() {
#if !defined(MINFER_SIMT) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
// The first half where nothing has been written.
__device__ inline void cluster_arrive_relaxed() {
#if !defined(MINFER_SIMT) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
__device__ inline void cluster_wait() {
#if !defined(MINFER_SIMT) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// Where block `rank` of the cluster has what this block has at `shared`.
template <class T>
__device__ inline T* cluster_peer(T* shared, int rank) {
#if !defined(MINFER_SIMT) && __CUDA_ARCH__ >= 900
    T* peer;
    asm("mapa.u64 %0, %1, %2;" : "=l"(peer) : "l"(shared), "r"(rank));
    return peer;
#else
    return shared;
#endif
}
