/* SPDX-License-Identifier: MIT */
/*
 * The only door to CUDA: the driver API as a table of functions (gpu_functions.def lists them), filled by dlopen. So one
 * binary serves machines with and without a GPU, nothing but kernels/ *.cu needs a CUDA installation to be built, and
 * another library can take the driver's place: HREDUCE_CUDA_LIBRARY names it (a path, or a name as dlopen takes it).
 *
 * Types and constants have the driver's values and sizes (tests/unit/test_gpu_driver.c compares them with cuda.h where
 * that is installed); only the names are shorter. Functions answer as the driver's do, with a hrg_result.
 *
 * Threads: any function of this header from any thread. None makes a context. Init() is the caller's to call where the
 * process has not done so.
 */
#ifndef HRG_GPU_DRIVER_H
#define HRG_GPU_DRIVER_H

#include <stddef.h>
#include <stdint.h>

typedef int hrg_result;      /* CUresult */
typedef int hrg_device;      /* CUdevice */
typedef uint64_t hrg_ptr;    /* CUdeviceptr */
typedef uint64_t hrg_handle; /* CUmemGenericAllocationHandle */
typedef struct hrg_ctx_st *hrg_ctx;
typedef struct hrg_stream_st *hrg_stream;
typedef struct hrg_event_st *hrg_event;
typedef struct hrg_module_st *hrg_module;
typedef struct hrg_function_st *hrg_function;
typedef struct hrg_graph_st *hrg_graph;

struct hrg_uuid {
    uint8_t bytes[16];
};

struct hrg_ipc_handle {
    uint8_t data[64];
};

struct hrg_mem_location {
    int type; /* HRG_LOCATION_* */
    int id;   /* ordinal of the device */
};

struct hrg_mem_prop {
    int type;                   /* HRG_ALLOCATION_PINNED */
    int requested_handle_types; /* HRG_HANDLE_* or'ed */
    struct hrg_mem_location location;
    void *win32;
    struct {
        unsigned char compression;
        unsigned char gpu_direct_rdma;
        unsigned short usage;
        unsigned char reserved[4];
    } flags;
};

struct hrg_mem_access {
    struct hrg_mem_location location;
    int flags; /* HRG_ACCESS_* */
};

/* Of the copies of MemcpyBatchAsync. */
struct hrg_copy_attributes {
    int src_access_order; /* HRG_SRC_ACCESS_* */
    struct hrg_mem_location src_hint, dst_hint;
    unsigned flags; /* HRG_COPY_* */
};

/* One element of StreamBatchMemOp: HRG_MEMOP_* says which; wait and write have the same layout. */
union hrg_memop {
    int operation;
    struct {
        int operation;
        hrg_ptr address;
        uint64_t value; /* of 32-bit operations the low half */
        unsigned flags;
        hrg_ptr alias; /* the driver's */
    } value;
    struct {
        int operation;
        unsigned flags;
    } barrier; /* also flush */
    uint64_t pad[6];
};

enum {
    HRG_SUCCESS = 0,
    HRG_ERROR_INVALID_VALUE = 1,
    HRG_ERROR_OUT_OF_MEMORY = 2,
    HRG_ERROR_NOT_INITIALIZED = 3,
    HRG_ERROR_DEINITIALIZED = 4,
    HRG_ERROR_NO_DEVICE = 100,
    HRG_ERROR_INVALID_DEVICE = 101,
    HRG_ERROR_INVALID_IMAGE = 200,
    HRG_ERROR_INVALID_CONTEXT = 201,
    HRG_ERROR_ALREADY_MAPPED = 208,
    HRG_ERROR_NO_BINARY_FOR_GPU = 209,
    HRG_ERROR_ECC_UNCORRECTABLE = 214,
    HRG_ERROR_PEER_ACCESS_UNSUPPORTED = 217,
    HRG_ERROR_INVALID_HANDLE = 400,
    HRG_ERROR_NOT_FOUND = 500,
    HRG_ERROR_NOT_READY = 600,
    HRG_ERROR_ILLEGAL_ADDRESS = 700,
    HRG_ERROR_LAUNCH_OUT_OF_RESOURCES = 701,
    HRG_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
    HRG_ERROR_CONTEXT_IS_DESTROYED = 709,
    HRG_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    HRG_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
    HRG_ERROR_LAUNCH_FAILED = 719,
    HRG_ERROR_NOT_PERMITTED = 800,
    HRG_ERROR_NOT_SUPPORTED = 801,
    HRG_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    HRG_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
    HRG_ERROR_STREAM_CAPTURE_ISOLATION = 905,
    HRG_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
    HRG_ERROR_UNKNOWN = 999
};

/* DeviceGetAttribute */
enum {
    HRG_DEV_MULTIPROCESSOR_COUNT = 16,
    HRG_DEV_INTEGRATED = 18,
    HRG_DEV_COMPUTE_MODE = 20,
    HRG_DEV_PCI_BUS_ID = 33,
    HRG_DEV_PCI_DEVICE_ID = 34,
    HRG_DEV_MAX_THREADS_PER_MULTIPROCESSOR = 39,
    HRG_DEV_ASYNC_ENGINE_COUNT = 40,
    HRG_DEV_UNIFIED_ADDRESSING = 41,
    HRG_DEV_PCI_DOMAIN_ID = 50,
    HRG_DEV_COMPUTE_CAPABILITY_MAJOR = 75,
    HRG_DEV_COMPUTE_CAPABILITY_MINOR = 76,
    HRG_DEV_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91,
    HRG_DEV_CAN_FLUSH_REMOTE_WRITES = 98,
    HRG_DEV_HOST_REGISTER_SUPPORTED = 99,
    HRG_DEV_VIRTUAL_MEMORY_MANAGEMENT = 102,
    HRG_DEV_HANDLE_TYPE_POSIX_FD = 103,
    HRG_DEV_GPU_DIRECT_RDMA_WITH_VMM = 110,
    HRG_DEV_GPU_DIRECT_RDMA = 116,
    HRG_DEV_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS = 117,
    HRG_DEV_GPU_DIRECT_RDMA_WRITES_ORDERING = 118,
    HRG_DEV_CAN_USE_64_BIT_STREAM_MEM_OPS = 122,
    HRG_DEV_DMA_BUF = 124,
    HRG_DEV_NUMA_CONFIG = 130,
    HRG_DEV_HOST_NUMA_ID = 134
};

/* PointerGetAttribute, with the type of its answer */
enum {
    HRG_PTR_CONTEXT = 1,                     /* hrg_ctx */
    HRG_PTR_MEMORY_TYPE = 2,                 /* unsigned: HRG_MEMORY_* */
    HRG_PTR_DEVICE_POINTER = 3,              /* hrg_ptr */
    HRG_PTR_HOST_POINTER = 4,                /* void * */
    HRG_PTR_SYNC_MEMOPS = 6,                 /* unsigned */
    HRG_PTR_BUFFER_ID = 7,                   /* unsigned long long, never used twice in a process */
    HRG_PTR_IS_MANAGED = 8,                  /* unsigned */
    HRG_PTR_DEVICE_ORDINAL = 9,              /* int */
    HRG_PTR_IS_LEGACY_CUDA_IPC_CAPABLE = 10, /* unsigned */
    HRG_PTR_RANGE_START_ADDR = 11,           /* hrg_ptr */
    HRG_PTR_RANGE_SIZE = 12,                 /* size_t */
    HRG_PTR_MAPPED = 13,                     /* unsigned */
    HRG_PTR_ALLOWED_HANDLE_TYPES = 14,       /* uint64_t: HRG_HANDLE_* */
    HRG_PTR_IS_GPU_DIRECT_RDMA_CAPABLE = 15, /* unsigned */
    HRG_PTR_MEMPOOL_HANDLE = 17              /* void * */
};

enum { HRG_MEMORY_HOST = 1, HRG_MEMORY_DEVICE = 2, HRG_MEMORY_ARRAY = 3, HRG_MEMORY_UNIFIED = 4 };

enum {
    HRG_STREAM_NON_BLOCKING = 1, /* StreamCreateWithPriority */
    HRG_EVENT_DISABLE_TIMING = 2,
    HRG_EVENT_BLOCKING_SYNC = 1,
    HRG_EVENT_INTERPROCESS = 4,
    HRG_CAPTURE_NONE = 0, /* StreamIsCapturing */
    HRG_CAPTURE_ACTIVE = 1,
    HRG_CAPTURE_INVALIDATED = 2,
    HRG_CAPTURE_MODE_GLOBAL = 0, /* StreamBeginCapture, ThreadExchangeStreamCaptureMode */
    HRG_CAPTURE_MODE_THREAD_LOCAL = 1,
    HRG_CAPTURE_MODE_RELAXED = 2,
    HRG_WAIT_GEQ = 0, /* StreamWaitValue64: (int64_t)(*addr - value) >= 0 */
    HRG_WAIT_EQ = 1,
    HRG_WAIT_FLUSH = 1 << 30,
    HRG_WRITE_DEFAULT = 0,
    HRG_WRITE_NO_MEMORY_BARRIER = 1,
    HRG_MEMOP_WAIT_32 = 1, /* union hrg_memop */
    HRG_MEMOP_WRITE_32 = 2,
    HRG_MEMOP_WAIT_64 = 4,
    HRG_MEMOP_WRITE_64 = 5,
    HRG_MEMOP_BARRIER = 6,
    HRG_MEMOP_FLUSH_REMOTE_WRITES = 3,
    HRG_HOST_PORTABLE = 1, /* MemHostRegister, MemHostAlloc */
    HRG_HOST_DEVICEMAP = 2,
    HRG_HOST_READ_ONLY = 8,
    HRG_ATTACH_GLOBAL = 1,     /* MemAllocManaged */
    HRG_SRC_ACCESS_STREAM = 1, /* struct hrg_copy_attributes */
    HRG_COPY_PREFER_OVERLAP_WITH_COMPUTE = 1,
    HRG_IPC_LAZY_ENABLE_PEER_ACCESS = 1,
    HRG_ALLOCATION_PINNED = 1,
    HRG_HANDLE_POSIX_FD = 1, /* MemExportToShareableHandle: int */
    HRG_HANDLE_FABRIC = 8,
    HRG_LOCATION_DEVICE = 1,
    HRG_ACCESS_NONE = 0,
    HRG_ACCESS_READ = 1,
    HRG_ACCESS_READWRITE = 3,
    HRG_GRANULARITY_MINIMUM = 0,
    HRG_GRANULARITY_RECOMMENDED = 1,
    HRG_RANGE_HANDLE_DMA_BUF = 1,
    HRG_FUNC_MAX_THREADS_PER_BLOCK = 0,
    HRG_FUNC_SHARED_SIZE_BYTES = 1,
    HRG_FUNC_NUM_REGS = 4,
    HRG_FUNC_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
    HRG_FLUSH_OPTION_HOST = 1,
    HRG_FLUSH_OPTION_MEMOPS = 2,
    HRG_FLUSH_TARGET_CURRENT_CTX = 0,
    HRG_FLUSH_TO_OWNER = 100,
    HRG_FLUSH_TO_ALL_DEVICES = 200,
    HRG_ORDERING_NONE = 0,
    HRG_ORDERING_OWNER = 100,
    HRG_ORDERING_ALL_DEVICES = 200
};

/* Streams that need not be made. NULL is the legacy one. */
#define HRG_STREAM_LEGACY ((hrg_stream)0x1)
#define HRG_STREAM_PER_THREAD ((hrg_stream)0x2)

struct hrg_driver {
    char library[256]; /* what was loaded: "libcuda.so.1" */
    int version;       /* of CUDA, as the driver says: 1000 * major + 10 * minor */
#define HRG_FN(field, symbol, since, need, args) hrg_result(*field) args;
#include "kernels/gpu_functions.def"
#undef HRG_FN
};

/*
 * The driver, loaded on the first call and kept for good. NULL: there is none that can be used, and `why` (may be NULL)
 * gets the sentence: which library, what failed or which function it lacks, and which version has it. A refusal stands
 * for the life of the process too.
 */
const struct hrg_driver *hrg_driver_get(char *why, size_t len);

/*
 * The same for a process that may have loaded CUDA itself or not: NULL while the driver's library is not in the process
 * (then no pointer can be the driver's). Loads nothing that is not there. Cheap enough to be asked for every buffer.
 */
const struct hrg_driver *hrg_driver_if_present(void);

/*
 * 0: this driver and device can write and wait for 64-bit words in stream order. Else -1, and `why` says what is missing
 * and which version has it.
 */
int hrg_stream_ops_check(const struct hrg_driver *drv, hrg_device dev, char *why, size_t len);

/* "CUDA_ERROR_INVALID_VALUE (1: invalid argument)", written to buf and returned. */
const char *hrg_error_text(const struct hrg_driver *drv, hrg_result error, char *buf, size_t len);

/* Errors after which the context (or the process) can do nothing any more: illegal address, launch failure, ECC, ... */
int hrg_error_is_sticky(hrg_result error);

/* "GPU-12345678-1234-1234-1234-123456789abc" (as nvidia-smi prints it), 41 bytes with its end; of an instance of MIG: "MIG-..." */
#define HRG_UUID_TEXT 41
void hrg_uuid_text(const struct hrg_uuid *uuid, int mig, char text[HRG_UUID_TEXT]);

/* The device's UUID; that of the instance where the device is one of MIG. */
hrg_result hrg_device_uuid(const struct hrg_driver *drv, hrg_device dev, struct hrg_uuid *uuid);
/* Whether it is an instance of MIG. */
int hrg_device_is_mig(const struct hrg_driver *drv, hrg_device dev);

#endif
