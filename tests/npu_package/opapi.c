/* The objects that operators are called with (libopapi.so), and the way into Python.
 *
 * Comes in: calls of torch_npu's host code, and of the entry points that entry_points.py appends.
 * Goes out: one call of the handler for each operator, with its arguments as a row of unions.
 * Always holds: an operator without an entry point does not exist here, so calling it fails.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define X __attribute__((visibility("default")))

typedef struct {
  int64_t dims, size[8], stride[8], offset, dtype, format, storage_dims, storage[8];
  void *data;
} aclTensor;
typedef struct {
  int64_t count;
  const aclTensor **items;
} aclTensorList;
typedef struct {
  int64_t dtype;
  double real;
  int64_t whole;
} aclScalar;
typedef struct {
  int64_t count;
  int64_t *items;
} aclIntArray;
typedef union {
  void *pointer;
  int64_t whole;
  double real;
} argument;
typedef int (*handler_t)(const char *, const char *, argument *, int);

static handler_t handler;
X void qc_set_handler(handler_t given) { handler = given; }

static int go(const char *name, const char *kinds, argument *row, int count, uint64_t *workspace,
              void **executor) {
  *workspace = 0;
  *executor = (void *)1;
  return handler ? handler(name, kinds, row, count) : 561103;
}

X aclTensor *aclCreateTensor(const int64_t *size, uint64_t dims, int dtype, const int64_t *stride,
                             int64_t offset, int format, const int64_t *storage,
                             uint64_t storage_dims, void *data) {
  aclTensor *made = calloc(1, sizeof *made);
  made->dims = dims;
  for (uint64_t i = 0; i < dims && i < 8; i++) {
    made->size[i] = size[i];
    made->stride[i] = stride[i];
  }
  made->offset = offset;
  made->dtype = dtype;
  made->format = format;
  made->storage_dims = storage_dims;
  for (uint64_t i = 0; i < storage_dims && i < 8; i++) made->storage[i] = storage[i];
  made->data = data;
  return made;
}
X int aclDestroyTensor(aclTensor *t) { free(t); return 0; }

X aclScalar *aclCreateScalar(void *value, int dtype) {
  aclScalar *made = calloc(1, sizeof *made);
  made->dtype = dtype;
  switch (dtype) {
    case 0: made->real = *(float *)value; break;
    case 11: made->real = *(double *)value; break;
    case 12: made->whole = *(unsigned char *)value; break;
    case 3: made->whole = *(int32_t *)value; break;
    default: made->whole = *(int64_t *)value;
  }
  if (dtype != 0 && dtype != 11) made->real = (double)made->whole;
  return made;
}
X int aclDestroyScalar(aclScalar *s) { free(s); return 0; }

X aclIntArray *aclCreateIntArray(const int64_t *items, uint64_t count) {
  aclIntArray *made = calloc(1, sizeof *made);
  made->count = count;
  made->items = malloc(8 * count + 8);
  memcpy(made->items, items, 8 * count);
  return made;
}
X int aclDestroyIntArray(aclIntArray *a) { if (a) free(a->items); free(a); return 0; }
X void *aclCreateBoolArray(const char *v, uint64_t n) { return calloc(1, 16); }
X int aclDestroyBoolArray(void *a) { free(a); return 0; }
X void *aclCreateFloatArray(const float *v, uint64_t n) { return calloc(1, 16); }
X int aclDestroyFloatArray(void *a) { free(a); return 0; }

X aclTensorList *aclCreateTensorList(const aclTensor *const *items, uint64_t count) {
  aclTensorList *made = calloc(1, sizeof *made);
  made->count = count;
  made->items = malloc(8 * count + 8);
  memcpy(made->items, items, 8 * count);
  return made;
}
X int aclDestroyTensorList(aclTensorList *l) {
  if (l) {
    for (int64_t i = 0; i < l->count; i++) free((void *)l->items[i]);
    free(l->items);
  }
  free(l);
  return 0;
}
X void *aclCreateScalarList(void *v, uint64_t n) { return calloc(1, 16); }
X int aclDestroyScalarList(void *a) { free(a); return 0; }
X int InitHugeMemThreadLocal(void *a, int b) { return 0; }
X void UnInitHugeMemThreadLocal(void *a, int b) {}
X void ReleaseHugeMem(void *a, int b) {}
X void AddTensorAddrToCachedList(void *a) {}
