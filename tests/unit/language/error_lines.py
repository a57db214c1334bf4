"""Lines that ended real runs, as PyTorch, NCCL, gloo, libraries and the kernel print them: (class, line, source).

`here` is a line that this repository's pinned torch printed on a machine without a GPU.
"""

from __future__ import annotations

from flyball.contracts.error_classes import ErrorClass as E

LINES = (
    (
        E.COLLECTIVE_TIMEOUT,
        "[rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) ran for 600060 milliseconds before timing out.",  # noqa: E501
        "https://github.com/hiyouga/LlamaFactory/issues/7396",
    ),
    (
        E.COLLECTIVE_TIMEOUT,
        "[E ProcessGroupNCCL.cpp:737] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=469508, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1802212 milliseconds before timing out.",  # noqa: E501
        "https://github.com/OFA-Sys/OFA/issues/271",
    ),
    (
        E.COLLECTIVE_TIMEOUT,
        "[rank0]: RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete",  # noqa: E501
        "here: torch 2.13.0, all_reduce with a timeout of 2 s",
    ),
    (
        E.CONNECTION_LOST,
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "https://github.com/NVIDIA/nccl/issues/2076",
    ),
    (
        E.CONNECTION_LOST,
        "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process exited or there was a network error, NCCL version 2.21.5",  # noqa: E501
        "https://github.com/NVIDIA/nccl/issues/2076",
    ),
    (
        E.CONNECTION_LOST,
        "[rank0]: RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:43714: Connection reset by peer. This is typically caused by a remote worker hanging or bugs in the application.",  # noqa: E501
        "here: torch 2.13.0, a peer that ended before all_reduce",
    ),
    (
        E.CONNECTION_LOST,
        "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",  # noqa: E501
        "libtorch 2.13.0, torch/csrc/distributed/c10d/TCPStore.cpp",
    ),
    (
        E.NCCL_ERROR,
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1333, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.18.1",  # noqa: E501
        "https://github.com/vllm-project/vllm/issues/10523",
    ),
    (
        E.NCCL_ERROR,
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. ",
        "https://github.com/pytorch/pytorch/issues/149984",
    ),
    (
        E.NCCL_ERROR,
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1331, unhandled cuda error (run with NCCL_DEBUG=INFO for details)",  # noqa: E501
        "https://github.com/pytorch/pytorch/issues/111187",
    ),
    (
        E.GPU_HARDWARE,
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "https://github.com/vllm-project/vllm/issues/5222",
    ),
    (
        E.GPU_HARDWARE,
        "CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered",
        "https://github.com/nagadit/DeepFaceLab_Linux/issues/89",
    ),
    (
        E.GPU_OUT_OF_MEMORY,
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 226.00 MiB. GPU 0 has a total capacity of 15.70 GiB of which 210.38 MiB is free. Including non-PyTorch memory, this process has 15.48 GiB memory in use. Of the allocated memory 14.81 GiB is allocated by PyTorch, and 336.73 MiB is reserved by PyTorch but unallocated.",  # noqa: E501
        "https://github.com/qingze-bai/VSmTrans/issues/3",
    ),
    (
        E.GPU_OUT_OF_MEMORY,
        "RuntimeError: CUDA out of memory. Tried to allocate 12.50 MiB (GPU 0; 10.92 GiB total capacity; 8.57 MiB already allocated; 9.28 GiB free; 4.68 MiB cached)",  # noqa: E501
        "https://github.com/pytorch/pytorch/issues/16417",
    ),
    (
        E.CUDA_ERROR,
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "https://github.com/pytorch/pytorch/pull/36668",
    ),
    (
        E.DEVICE_ASSERT,
        "RuntimeError: CUDA error: device-side assert triggered",
        "CUDA runtime, cudaErrorAssert (710), as c10/cuda/CUDAException.cpp prints it",
    ),
    (
        E.HOST_OUT_OF_MEMORY,
        "Memory cgroup out of memory: Killed process 629 (onmt_train) total-vm:14119556kB, anon-rss:6538204kB, file-rss:80652kB, shmem-rss:16kB, UID:0 pgtables:13432kB oom_score_adj:0",  # noqa: E501
        "https://github.com/ymoslem/OpenNMT-Tutorial/issues/6",
    ),
    (
        E.HOST_OUT_OF_MEMORY,
        "RuntimeError: [enforce fail at CPUAllocator.cpp:64] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 402653184 bytes. Error code 12 (Cannot allocate memory).",  # noqa: E501
        "https://github.com/Esri/arcgis-python-api/issues/743",
    ),
    (
        E.HOST_OUT_OF_MEMORY,
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.28 TiB for an array with shape (1000000000000,) and data type float64",  # noqa: E501
        "here: numpy 2, np.ones(10**12)",
    ),
    (
        E.HOST_OUT_OF_MEMORY,
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000000000 bytes. Error code 12 (Cannot allocate memory)",  # noqa: E501
        "here: torch 2.13.0, torch.empty(10**15)",
    ),
    (E.HOST_OUT_OF_MEMORY, "MemoryError", "here: Python 3.11, bytearray(1 << 60)"),
    (
        E.SHARED_MEMORY,
        "RuntimeError: DataLoader worker (pid 46794) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit.",  # noqa: E501
        "https://github.com/hkchengrex/STCN/issues/132",
    ),
    (
        E.SHARED_MEMORY,
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
        "https://github.com/facebookresearch/mmf/issues/441",
    ),
    (
        E.DATA_LOADER,
        "RuntimeError: DataLoader worker (pid 12847) is killed by signal: Killed.",
        "https://github.com/TorchSSL/TorchSSL/issues/4",
    ),
    (
        E.DATA_LOADER,
        "RuntimeError: DataLoader worker (pid(s) 4242) exited unexpectedly",
        "torch 2.13.0, torch/utils/data/dataloader.py",
    ),
    (E.IMPORT_ERROR, "ModuleNotFoundError: No module named 'flash_attn'", "here: Python 3.11"),
    (
        E.IMPORT_ERROR,
        "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
        "glibc's loader, elf/dl-load.c, as Python 3.11 raises it",
    ),
    (E.STORAGE, "OSError: [Errno 28] No space left on device", "here: Python 3.11, write to a full tmpfs"),
    (
        E.STORAGE,
        "OSError: [Errno 116] Stale file handle: '/data/train/0001.tar'",
        "Linux errno ESTALE, as Python prints it",
    ),
    (E.STORAGE, "OSError: [Errno 5] Input/output error: 'shard-17.bin'", "Linux errno EIO"),
    (
        E.STORAGE,
        "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598",
        "here: torch 2.13.0, torch.save to a full device",
    ),
)
