// Libraries of CUDA in which every function succeeds and none computes: what the program of a GPU calls can be run
// without one. Memory of the device is memory of the host, filled with 0x3c, a small number in every floating-point
// type; copies copy, kernels and matrix products leave their results as they are.
//
// NULL_GPU_MAJOR: the major compute capability (8). NULL_GPU_COUNT: devices (1). NULL_GPU_BYTES: memory (85e9).
// NULL_GPU_CAPTURES: whether graphs can be captured (1).
// __main__.py adds functions that do nothing for all others that torch calls.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <driver_types.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { OK = 0, OUT_OF_MEMORY = 2, NOT_SUPPORTED = 801, NOT_FOUND = 500, CAPTURE_INVALIDATED = 901, FILL = 0x3c };

static double setting(const char* name, double otherwise) {
    const char* text = getenv(name);
    return text ? atof(text) : otherwise;
}
static int major_capability(void) { return setting("NULL_GPU_MAJOR", 8); }
static const char* device_name(void) {
    return major_capability() == 9 ? "NVIDIA H100 80GB HBM3" : "NVIDIA A100-SXM4-80GB";
}
static int devices(void) { return setting("NULL_GPU_COUNT", 1); }
static size_t memory(void) { return setting("NULL_GPU_BYTES", 85e9); }
static int made(void** handle) { return *handle = calloc(1, 256), OK; }  // streams, events, descriptors

// --- memory: that of cudaMalloc and pinned blocks in a list, that of expandable segments by its number of bytes

typedef struct Block {
    char* start;
    size_t bytes;
    int of_device;
    struct Block* next;
} Block;
static Block* blocks;
static size_t used, mapped;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int allocate(void** start, size_t bytes, int of_device) {
    if (of_device && used + mapped + bytes > memory()) return OUT_OF_MEMORY;
    if (posix_memalign(start, 512, bytes ? bytes : 1)) return OUT_OF_MEMORY;
    memset(*start, of_device ? FILL : 0, bytes);
    Block* block = malloc(sizeof *block);
    pthread_mutex_lock(&lock);
    *block = (Block){*start, bytes, of_device, blocks};
    blocks = block;
    used += of_device ? bytes : 0;
    pthread_mutex_unlock(&lock);
    return OK;
}

static int release(void* start) {
    pthread_mutex_lock(&lock);
    for (Block** at = &blocks; *at; at = &(*at)->next)
        if ((*at)->start == start) {
            Block* block = *at;
            *at = block->next;
            used -= block->of_device ? block->bytes : 0;
            free(block->start);
            free(block);
            break;
        }
    pthread_mutex_unlock(&lock);
    return OK;
}

int cudaMalloc(void** p, size_t n) { return allocate(p, n, 1); }
int cudaMallocAsync(void** p, size_t n, void* stream) { return allocate(p, n, 1); }
int cudaFree(void* p) { return release(p); }
int cudaFreeAsync(void* p, void* stream) { return release(p); }
int cudaHostAlloc(void** p, size_t n, unsigned flags) { return allocate(p, n, 0); }
int cudaFreeHost(void* p) { return release(p); }
int cudaMemGetInfo(size_t* left, size_t* total) { return *total = memory(), *left = *total - used - mapped, OK; }
int cudaMemcpy(void* to, const void* from, size_t n, int kind) { return memmove(to, from, n), OK; }
int cudaMemcpyAsync(void* to, const void* from, size_t n, int kind, void* stream) { return memmove(to, from, n), OK; }
int cudaMemcpyPeerAsync(void* to, int a, const void* from, int b, size_t n) { return memmove(to, from, n), OK; }
int cudaMemset(void* p, int value, size_t n) { return memset(p, value, n), OK; }
int cudaMemsetAsync(void* p, int value, size_t n, void* stream) { return memset(p, value, n), OK; }

int cudaPointerGetAttributes(struct cudaPointerAttributes* found, const void* p) {
    memset(found, 0, sizeof *found);
    found->type = cudaMemoryTypeUnregistered;
    pthread_mutex_lock(&lock);
    for (Block* block = blocks; block; block = block->next)
        if ((char*)p >= block->start && (char*)p < block->start + block->bytes) {
            found->type = block->of_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
            found->devicePointer = (void*)p;
            found->hostPointer = block->of_device ? NULL : (void*)p;
        }
    pthread_mutex_unlock(&lock);
    return OK;
}

int cuMemAddressReserve(void** p, size_t n, size_t alignment, size_t address, size_t flags) {
    *p = mmap(NULL, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return *p == MAP_FAILED ? OUT_OF_MEMORY : OK;
}
int cuMemAddressFree(void* p, size_t n) { return munmap(p, n), OK; }
int cuMemGetAllocationGranularity(size_t* bytes) { return *bytes = 2 << 20, OK; }
int cuMemCreate(size_t* handle, size_t n) {
    if (used + mapped + n > memory()) return OUT_OF_MEMORY;
    return mapped += n, *handle = n, OK;
}
int cuMemRelease(size_t handle) { return mapped -= handle, OK; }
int cuMemMap(void* p, size_t n) { return mprotect(p, n, PROT_READ | PROT_WRITE), memset(p, FILL, n), OK; }
int cuMemUnmap(void* p, size_t n) { return madvise(p, n, MADV_DONTNEED), mprotect(p, n, PROT_NONE), OK; }
int cuMemExportToShareableHandle(void) { return NOT_SUPPORTED; }

// --- the device, as the runtime and the driver describe it

static __thread int current;
int cudaGetDeviceCount(int* n) { return *n = devices(), OK; }
int cudaGetDevice(int* device) { return *device = current, OK; }
int cudaSetDevice(int device) { return current = device, OK; }
int cudaDriverGetVersion(int* version) { return *version = 13000, OK; }
int cudaRuntimeGetVersion(int* version) { return *version = 13000, OK; }
int cudaDeviceGetPCIBusId(char* text, int n, int device) { return snprintf(text, n, "0000:01:00.0"), OK; }
int cudaDeviceCanAccessPeer(int* can) { return *can = 0, OK; }
int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, OK; }

static int attribute(int which) {
    switch (which) {
    case cudaDevAttrComputeCapabilityMajor: return major_capability();
    case cudaDevAttrComputeCapabilityMinor: return 0;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 166912;  // of an A100
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 167936;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrL2CacheSize: return 40 << 20;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return 65535;
    default: return 1;
    }
}
int cudaDeviceGetAttribute(int* value, int which, int device) { return *value = attribute(which), OK; }
int cuDeviceGetAttribute(int* value, int which, int device) { return *value = attribute(which), OK; }  // numbered alike

int cudaGetDeviceProperties(struct cudaDeviceProp* found, int device) {
    memset(found, 0, sizeof *found);
    strcpy(found->name, device_name());
    found->totalGlobalMem = memory();
    found->major = major_capability();
    found->warpSize = 32;
    found->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
    found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
    found->maxThreadsDim[2] = 64;
    found->maxThreadsPerMultiProcessor = 2048;
    found->maxBlocksPerMultiProcessor = 32;
    found->maxGridSize[0] = 2147483647;
    found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->regsPerBlock = found->regsPerMultiprocessor = 65536;
    found->sharedMemPerBlock = 49152;
    found->sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    found->sharedMemPerMultiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    found->totalConstMem = 65536;
    found->textureAlignment = 512;
    found->l2CacheSize = 40 << 20;
    found->unifiedAddressing = found->canMapHostMemory = found->managedMemory = found->concurrentKernels = 1;
    return OK;
}

// --- streams, events, kernels

int cudaStreamCreate(void** stream) { return made(stream); }
int cudaStreamCreateWithFlags(void** stream) { return made(stream); }
int cudaStreamCreateWithPriority(void** stream) { return made(stream); }
static void* captured;  // the stream of which a graph is being made
int cudaStreamBeginCapture(void* stream) { return captured = stream, OK; }
int cudaStreamEndCapture(void* stream, void** graph) {
    captured = NULL;
    return setting("NULL_GPU_CAPTURES", 1) ? made(graph) : CAPTURE_INVALIDATED;
}
int cudaGraphInstantiate(void** graph) { return made(graph); }
int cudaGraphInstantiateWithFlags(void** graph) { return made(graph); }
int cudaStreamIsCapturing(void* stream, int* status) { return *status = stream && stream == captured, OK; }
int cudaStreamGetCaptureInfo(void* stream, int* status, unsigned long long* id) {
    if (id) *id = 1;
    return *status = stream && stream == captured, OK;
}
int cudaStreamGetPriority(void* stream, int* priority) { return *priority = 0, OK; }
int cudaEventCreate(void** event) { return made(event); }
int cudaEventCreateWithFlags(void** event) { return made(event); }
int cudaEventElapsedTime(float* milliseconds) { return *milliseconds = 1, OK; }
const char* cudaGetErrorString(int error) {
    static char text[32];
    snprintf(text, sizeof text, "error %d", error);
    return error == OUT_OF_MEMORY ? "out of memory" : text;
}
const char* cudaGetErrorName(int error) { return error == OUT_OF_MEMORY ? "cudaErrorMemoryAllocation" : "an error"; }
int cudaGetSymbolAddress(void** p) { static char symbol[1 << 20]; return *p = symbol, OK; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n) { return *n = 1, OK; }
int cudaFuncGetAttributes(struct cudaFuncAttributes* found) {
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024;
    found->numRegs = 32;
    found->maxDynamicSharedSizeBytes = 49152;
    found->ptxVersion = found->binaryVersion = 10 * major_capability();  // CUB chooses by it
    return OK;
}
int cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version, size_t flags, int* status) {
    char renamed[256];
    snprintf(renamed, sizeof renamed, "%s_v2", name);
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) *function = dlsym(RTLD_DEFAULT, renamed);
    if (status) *status = *function ? 0 : 1;
    if (!*function) fprintf(stderr, "null_gpu: there is no %s\n", name);
    return *function ? OK : NOT_FOUND;
}

int cuDriverGetVersion(int* version) { return *version = 13000, OK; }
int cuDeviceGetCount(int* n) { return *n = devices(), OK; }
int cuDeviceGet(int* device, int number) { return *device = number, OK; }
int cuDeviceGetName(char* text, int n, int device) { return snprintf(text, n, "%s", device_name()), OK; }
int cuDeviceTotalMem_v2(size_t* bytes) { return *bytes = memory(), OK; }
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) { return *flags = 0, *active = 1, OK; }
int cuDevicePrimaryCtxRetain(void** context) { return made(context); }
int cuCtxGetCurrent(void** context) { return made(context); }
int cuCtxPopCurrent_v2(void** context) { return made(context); }
int cuCtxGetDevice(int* device) { return *device = current, OK; }
int cuModuleLoad(void** module) { return made(module); }
int cuModuleLoadData(void** module) { return made(module); }
int cuModuleLoadDataEx(void** module) { return made(module); }
int cuModuleGetFunction(void** function) { return made(function); }
int cuFuncGetAttribute(int* value, int which) { return *value = which == 0 ? 1024 : which == 4 ? 32 : 0, OK; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n) { return *n = 1, OK; }
int cuOccupancyMaxActiveClusters(int* n) { return *n = 1, OK; }
int cuGetErrorString(int error, const char** text) { return *text = cudaGetErrorString(error), OK; }
int cuPointerGetAttribute(void* value, int which, size_t p) {
    return which == 3 ? (*(size_t*)value = p, OK) : (*(int*)value = 2, OK);  // 3: its address there; 2: of a device
}
int nvmlDeviceGetGpuFabricInfoV(void) { return 3; }  // not supported
int nvmlDeviceGetComputeRunningProcesses(void) { return 3; }

// --- libraries

int cublasCreate_v2(void** handle) { return made(handle); }
int cublasGetMathMode(void* handle, int* mode) { return *mode = 0, OK; }
int cublasGetPointerMode_v2(void* handle, int* mode) { return *mode = 0, OK; }
size_t cublasLtGetVersion(void) { return 130100; }
int cublasLtMatmulDescCreate(void** handle) { return made(handle); }
int cublasLtMatmulPreferenceCreate(void** handle) { return made(handle); }
int cublasLtMatrixLayoutCreate(void** handle) { return made(handle); }
int cublasLtMatmulAlgoGetHeuristic(
    void* a, void* b, void* c, void* d, void* e, void* f, void* g, int wanted, void* results, int* found
) {
    return memset(results, 0, 96), *found = 1, OK;
}

int ncclGetVersion(int* version) { return *version = 22800, OK; }
int ncclGetUniqueId(void* id) { return memset(id, 7, 128), OK; }
int ncclCommInitRank(void** group) { return made(group); }
int ncclCommInitRankConfig(void** group) { return made(group); }
int ncclCommInitRankScalable(void** group) { return made(group); }
int ncclCommSplit(void* of, int color, int key, void** group) { return made(group); }
int ncclCommGetAsyncError(void* group, int* error) { return *error = 0, OK; }
int ncclCommCount(void* group, int* n) { return *n = devices(), OK; }
int ncclCommUserRank(void* group, int* rank) { return *rank = 0, OK; }
const char* ncclGetErrorString(int error) { return "an error"; }
const char* ncclGetLastError(void* group) { return ""; }
