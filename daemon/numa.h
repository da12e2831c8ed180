/* SPDX-License-Identifier: MIT */
/* Memory near the device that uses it. All of it is advice: on a machine that says nothing, memory is where it is. */
#ifndef HRD_NUMA_H
#define HRD_NUMA_H

#include <stddef.h>
#include <stdint.h>

#define HRD_NUMA_MAX 8u /* nodes that are told apart */

/* How many nodes this machine has, at least 1. sysfs: "/sys", or what a test puts in its place. */
unsigned hrd_numa_nodes(const char *sysfs);
/* The node of a PCI device ("0000:18:00.0", in either case), below hrd_numa_nodes(); 0 where the firmware does not say. */
unsigned hrd_numa_of_pci(const char *sysfs, const char *pci);
/* Pages of this range that nobody touched yet come from this node, while it has any. */
void hrd_numa_prefer(void *base, uint64_t bytes, unsigned node);

#endif
