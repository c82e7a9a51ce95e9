// A stand-in for CUDA's driver whose device memory is the host's: an allocation is a file in memory, which lives as long
// as a descriptor or a mapping of it. The declarations are those of cuda.h (CUDA 12).
//
// STAND_IN_CUDA_FAILS names a function that fails with CUDA_ERROR_OUT_OF_MEMORY.

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
enum CUmemAllocationHandleType { CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1 };
enum CUmemAllocationType { CU_MEM_ALLOCATION_TYPE_PINNED = 1 };
enum CUmemLocationType { CU_MEM_LOCATION_TYPE_DEVICE = 1 };
enum CUmemAccess_flags { CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3 };
struct CUmemLocation {
  CUmemLocationType type;
  int id;
};
struct CUmemAllocationProp {
  CUmemAllocationType type;
  CUmemAllocationHandleType requestedHandleTypes;
  CUmemLocation location;
  void *win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
};
struct CUmemAccessDesc {
  CUmemLocation location;
  CUmemAccess_flags flags;
};

namespace {
const CUresult INVALID = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3;
const int DEVICE = 1;
const size_t GRANULARITY = 2 << 20;
bool is_initialized = false;

CUresult outcome(const char *name, bool is_right = true) {
  const char *failing = getenv("STAND_IN_CUDA_FAILS");
  if (!is_initialized) return NOT_INITIALIZED;
  if (failing && !strcmp(failing, name)) return OUT_OF_MEMORY;
  return is_right ? 0 : INVALID;
}

bool is_usual(const CUmemAllocationProp *prop) {
  CUmemAllocationProp usual;
  memset(&usual, 0, sizeof usual);
  usual.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  usual.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  usual.location = {CU_MEM_LOCATION_TYPE_DEVICE, DEVICE};
  return !memcmp(prop, &usual, sizeof usual);
}

off_t size_of(int descriptor) { return lseek(descriptor, 0, SEEK_END); }
} // namespace

#define TRY(...)                                                                                                       \
  if (CUresult result = outcome(__func__, __VA_ARGS__)) return result

extern "C" {
CUresult cuInit(unsigned int flags) {
  is_initialized = flags == 0;
  return outcome(__func__);
}

CUresult cuDeviceGet(int *device, int ordinal) {
  TRY(ordinal == DEVICE);
  *device = DEVICE + 100;
  return 0;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
  TRY(device == DEVICE + 100);
  *value = attribute == 103 && !getenv("STAND_IN_CUDA_EXPORTS_NOTHING");
  return 0;
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop, int) {
  TRY(is_usual(prop));
  *granularity = GRANULARITY;
  return 0;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                     unsigned long long flags) {
  TRY(is_usual(prop) && size > 0 && size % GRANULARITY == 0 && flags == 0);
  int descriptor = memfd_create("stand-in-device", MFD_CLOEXEC);
  if (descriptor < 0 || ftruncate(descriptor, size)) return OUT_OF_MEMORY;
  *handle = 1000 + descriptor;
  return 0;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  TRY(size_of(handle - 1000) > 0);
  return close(handle - 1000) ? INVALID : 0;
}

CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
  TRY(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && flags == 0 && size_of(handle - 1000) > 0);
  *static_cast<int *>(shareable) = fcntl(handle - 1000, F_DUPFD_CLOEXEC, 0);
  return 0;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable,
                                        CUmemAllocationHandleType type) {
  int descriptor = static_cast<int>(reinterpret_cast<uintptr_t>(shareable));
  TRY(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && size_of(descriptor) > 0);
  *handle = 1000 + fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  return 0;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags) {
  TRY(size > 0 && size % GRANULARITY == 0 && !alignment && !wanted && !flags);
  void *found = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return OUT_OF_MEMORY;
  *address = reinterpret_cast<CUdeviceptr>(found);
  return 0;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
  TRY(true);
  return munmap(reinterpret_cast<void *>(address), size) ? INVALID : 0;
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  TRY(offset == 0 && flags == 0 && size_of(handle - 1000) == static_cast<off_t>(size));
  void *at = reinterpret_cast<void *>(address);
  return mmap(at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handle - 1000, 0) == at ? 0 : INVALID;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count) {
  TRY(count == 1 && access->location.type == CU_MEM_LOCATION_TYPE_DEVICE && access->location.id == DEVICE &&
      access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  return mprotect(reinterpret_cast<void *>(address), size, PROT_READ | PROT_WRITE) ? INVALID : 0;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  TRY(true);
  void *at = reinterpret_cast<void *>(address);
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  return mmap(at, size, PROT_NONE, flags, -1, 0) == at ? 0 : INVALID;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == OUT_OF_MEMORY ? "out of memory" : error == INVALID ? "invalid argument" : "not initialized";
  return 0;
}
}
