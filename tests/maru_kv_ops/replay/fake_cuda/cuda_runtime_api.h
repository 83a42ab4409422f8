// As much of CUDA's runtime as copy_engine.cpp calls, in the form that CUDART_VERSION has it.
// Copies are carried out at once and written down on standard output.

#pragma once

#include <cstddef>

using cudaStream_t = struct FakeStream*;
inline const cudaStream_t cudaStreamLegacy = reinterpret_cast<cudaStream_t>(1);

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum cudaMemcpyKind { cudaMemcpyDefault = 4 };

cudaError_t cudaGetLastError();
cudaError_t cudaRuntimeGetVersion(int* version);
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream);

#if CUDART_VERSION >= 12080
enum cudaMemcpySrcAccessOrder {
    cudaMemcpySrcAccessOrderStream = 1,
    cudaMemcpySrcAccessOrderDuringApiCall = 2,
    cudaMemcpySrcAccessOrderAny = 3,
};
enum cudaMemcpyFlags { cudaMemcpyFlagPreferOverlapWithCompute = 1 };
struct cudaMemcpyAttributes {
    cudaMemcpySrcAccessOrder srcAccessOrder;
    int srcLocHint, dstLocHint;
    unsigned int flags;
};
#if CUDART_VERSION >= 13000
cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from, const size_t* sizes,
                                 size_t count, cudaMemcpyAttributes* attributes,
                                 size_t* first_entries, size_t num_attributes, cudaStream_t stream);
#else
cudaError_t cudaMemcpyBatchAsync(void** to, void** from, size_t* sizes, size_t count,
                                 cudaMemcpyAttributes* attributes, size_t* first_entries,
                                 size_t num_attributes, size_t* failed_entry, cudaStream_t stream);
#endif
#endif
