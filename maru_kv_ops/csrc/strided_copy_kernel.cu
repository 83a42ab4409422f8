#include <cuda_runtime.h>

#include "kernel_body.h"
#include "strided_copy_kernel.h"

namespace maru {

namespace {

// Every byte is read once and written once: accesses marked as streaming leave the caches to the
// engine's kernels.
struct StreamedMemory {
    template <class T> MARU_HD T load(const T* from) const {
#if defined(__CUDA_ARCH__)
        if constexpr (sizeof(T) == 16) {
            const ulonglong2 held = __ldcs(reinterpret_cast<const ulonglong2*>(from));
            return T{held.x, held.y};
        } else if constexpr (sizeof(T) == 8) {
            return __ldcs(reinterpret_cast<const unsigned long long*>(from));
        } else {
            return __ldcs(from);
        }
#else
        return *from;
#endif
    }

    template <class T> MARU_HD void store(T* to, T value) const {
#if defined(__CUDA_ARCH__)
        if constexpr (sizeof(T) == 16)
            __stcs(reinterpret_cast<ulonglong2*>(to), ulonglong2{value.low, value.high});
        else if constexpr (sizeof(T) == 8)
            __stcs(reinterpret_cast<unsigned long long*>(to), value);
        else
            __stcs(to, value);
#else
        *to = value;
#endif
    }
};

__global__ void __launch_bounds__(kThreads)
    copy_by_numbers_in_memory(const __grid_constant__ StridedCopy copy,
                              const __grid_constant__ CopyLaunch launch) {
    StreamedMemory memory;
    strided_copy_body(copy, ItemNumbers{copy.ids, copy.object_starts}, launch,
                      static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x), memory);
}

__global__ void __launch_bounds__(kThreads)
    copy_by_own_numbers(const __grid_constant__ StridedCopy copy,
                        const __grid_constant__ OwnNumbers numbers,
                        const __grid_constant__ CopyLaunch launch) {
    StreamedMemory memory;
    strided_copy_body(copy, numbers.view(), launch, static_cast<int>(blockIdx.x),
                      static_cast<int>(threadIdx.x), memory);
}

cudaLaunchConfig_t config_of(const CopyLaunch& launch, cudaStream_t stream) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(launch.blocks));
    config.blockDim = dim3(static_cast<unsigned>(launch.threads));
    config.stream = stream;
    return config;
}

// The result of a launch, without leaving it behind as the thread's last error as well.
cudaError_t taken(cudaError_t error) {
    if (error != cudaSuccess)
        static_cast<void>(cudaGetLastError());
    return error;
}

} // namespace

cudaError_t launch_strided_copy(const StridedCopy& copy, int max_blocks, cudaStream_t stream) {
    const CopyLaunch launch = choose_launch(copy, max_blocks);
    if (launch.blocks == 0)
        return cudaSuccess;
    const cudaLaunchConfig_t config = config_of(launch, stream);
    return taken(cudaLaunchKernelEx(&config, copy_by_numbers_in_memory, copy, launch));
}

cudaError_t launch_with_own_numbers(const StridedCopy& copy, int max_blocks, cudaStream_t stream) {
    OwnNumbers numbers{};
    for (int64_t first = copy.first_item; first < copy.num_items;) {
        const StridedCopy part = own_part(copy, first, numbers);
        first += part.num_items;
        const CopyLaunch launch = choose_launch(part, max_blocks);
        if (launch.blocks == 0)
            continue;
        const cudaLaunchConfig_t config = config_of(launch, stream);
        const cudaError_t error =
            taken(cudaLaunchKernelEx(&config, copy_by_own_numbers, part, numbers, launch));
        if (error != cudaSuccess)
            return error;
    }
    return cudaSuccess;
}

} // namespace maru
